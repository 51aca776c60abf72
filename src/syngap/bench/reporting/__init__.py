"""Tables, the page and figures: everything is read from run folders, nothing is trained."""
