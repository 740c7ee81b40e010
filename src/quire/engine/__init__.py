"""The engine: control plane and compute plane, assembled. Import what you need from the modules; nothing is eager."""
