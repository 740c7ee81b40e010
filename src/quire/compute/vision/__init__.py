"""Image encoders: from the pixels of an image to rows that a text model reads in place of embedded tokens."""
