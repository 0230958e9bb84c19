"""Operations of Apple silicon."""
