"""Signal in, arrays out: decoding, resampling, log-mel spectra, and pictures cut into patches."""
