"""The pilot: stages of users, each watched against stop conditions, a way back, and a signed decision."""
