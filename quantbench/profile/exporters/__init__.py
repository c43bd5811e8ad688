"""Profiles in the formats that planners and simulators load unmodified."""
