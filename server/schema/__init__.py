"""What goes over the wire: strict JSON in, msgspec structs, replies out."""
