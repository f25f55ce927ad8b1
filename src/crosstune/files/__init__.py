"""Files: atomic writing, strict readers of JSON, YAML and safetensors, limits, the record and the run lock."""
