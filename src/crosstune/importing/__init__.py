"""Turn other trainers' configurations into options of crosstune."""
