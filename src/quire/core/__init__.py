"""The contract between the planes: values and protocols, standard library only."""
