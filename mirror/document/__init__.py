"""What a document is made of, and looking into it: for anyone who answers readers, from a store or from memory."""
