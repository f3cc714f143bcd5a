"""What hisparse is measured against, besides what other packages bring."""
