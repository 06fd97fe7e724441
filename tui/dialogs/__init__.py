"""What is asked in front of everything else. Esc always leaves, and changes nothing."""
