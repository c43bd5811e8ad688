"""How good the latency models are: the protocols rerun on measured tables, against simple and foreign baselines."""
