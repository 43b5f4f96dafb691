"""What a document is made of, and looking into it: for whoever answers readers, from a store or from memory."""
