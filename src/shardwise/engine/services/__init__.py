"""What users ask for beside training itself."""
