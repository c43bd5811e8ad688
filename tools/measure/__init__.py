"""What is measured on a GPU beside sweeps: other timing methods, the cost of a point, copies,
random products.
"""
