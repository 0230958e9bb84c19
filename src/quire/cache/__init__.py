"""What is kept between steps: specs, ledger and prefix index in pure Python; pools on the device."""
