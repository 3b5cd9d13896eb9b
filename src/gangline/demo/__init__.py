"""Does it work here? The whole story on this one computer, told with the functions that every other run uses."""
