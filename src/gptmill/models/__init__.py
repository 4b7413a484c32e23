"""Pure nn.Modules and their losses. Knows no ranks and no files."""
