"""The buffer process: accounts for every trajectory, keeps it until it is trained, and never loses one."""
