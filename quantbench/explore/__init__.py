"""A page that predicts any shape in the browser: the cost models as WebAssembly, the rest as data."""
