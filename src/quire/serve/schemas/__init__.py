"""What requests and answers look like, as msgspec structs; `parse` turns a body into one of them."""
