"""Weight files, validated before they are mapped, and the arrays in them."""
