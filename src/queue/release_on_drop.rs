//! A guard that releases a claim when it is dropped, so that nothing stays locked after its caller has gone away.

/// An item that is claimed for a caller. Dropping it releases the claim, unless the caller has taken it out.
pub(crate) struct ReleaseOnDrop<T> {
    contents: Option<T>,
    release_claim: Option<Box<dyn FnOnce(T) + Send>>,
}

impl<T> ReleaseOnDrop<T> {
    pub(crate) fn new(contents: T, release_claim: impl FnOnce(T) + Send + 'static) -> Self {
        Self { contents: Some(contents), release_claim: Some(Box::new(release_claim)) }
    }

    /// Takes the item out, for a caller that has received it.
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
