"""What happens under load, over a day and over a fleet?"""
