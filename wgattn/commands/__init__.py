"""What the larger commands of `wgattn` do, a module each; `wgattn.cli` parses and calls them."""
