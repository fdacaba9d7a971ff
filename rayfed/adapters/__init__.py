"""Small trainable modules put into a frozen backbone."""
