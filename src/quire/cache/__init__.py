"""What is kept between steps: specs, ledger, prefix index in pure Python; pools on the device."""
