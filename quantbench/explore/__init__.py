"""A page that predicts any shape in the browser: the code of the models as JavaScript, their trees
as data.
"""
