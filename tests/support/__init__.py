"""What tests share, and programs that check at length what tests check in part."""
