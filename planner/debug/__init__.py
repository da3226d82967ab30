"""The values between the stages of planning: printed as text, and checked where they are made."""
