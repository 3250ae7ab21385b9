"""The artifacts between the worlds: frozen, versioned, readable without torch, each with the hash of what made it."""
