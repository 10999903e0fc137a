"""What the backends of virtual functions share, on fake trees and values."""
