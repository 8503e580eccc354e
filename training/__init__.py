"""How the bundled models are made: data, autoencoders, transformers, assembly, evaluation."""
