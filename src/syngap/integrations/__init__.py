"""SynGAP in frameworks that own the training loop: a module for each, which imports it."""
