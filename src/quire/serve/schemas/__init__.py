"""The forms of requests and answers, as msgspec structs; `parse` turns a body into a request."""
