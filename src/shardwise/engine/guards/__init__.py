"""What would train wrongly without a word is named here."""
