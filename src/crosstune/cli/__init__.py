"""The command line, one file per subcommand: arguments in, text or JSON out."""
