"""What several rooms use: timing, results and their pictures, real prompts."""
