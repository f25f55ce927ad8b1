"""The command line, one module per subcommand: parse the arguments, print text or JSON."""
