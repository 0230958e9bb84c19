"""The generated world: every training and test item comes from the modules in here."""
