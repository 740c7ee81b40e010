"""Files of weights, validated before anything is mapped, and the arrays in them."""
