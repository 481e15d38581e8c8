"""Power caps: set within the card's range, remembered, put back; and calibrated."""
