//! What a claim hands over, so that nothing stays locked by nobody when the caller has gone away.

/// Something claimed for a caller. Where nobody takes it out, it is given back.
pub(crate) struct ReleaseOnDrop<T> {
    contents: Option<T>,
    release_claim: Option<Box<dyn FnOnce(T) + Send>>,
}

impl<T> ReleaseOnDrop<T> {
    pub(crate) fn new(contents: T, release_claim: impl FnOnce(T) + Send + 'static) -> Self {
        Self { contents: Some(contents), release_claim: Some(Box::new(release_claim)) }
    }

    /// The caller has it now.
    pub(crate) fn open(mut self) -> Option<T> {
        self.release_claim = None;
        self.contents.take()
    }
}

impl<T> Drop for ReleaseOnDrop<T> {
    fn drop(&mut self) {
        if let (Some(contents), Some(release_claim)) = (self.contents.take(), self.release_claim.take()) {
            release_claim(contents);
        }
    }
}
