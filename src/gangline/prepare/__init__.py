"""What has to be changed on the hosts? Steps turn facts into changes, which are shown first, recorded and undone."""
