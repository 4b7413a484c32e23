"""The public Python API, on which the command line stands. `import gptmill` offers its names."""
