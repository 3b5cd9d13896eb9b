"""Which hosts with sshd are on this computer's networks? Asks no host to log in, and scans nothing unless asked to."""
