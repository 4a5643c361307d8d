"""What the matrices of a model read, observed on a text, and rounding that minds it."""
