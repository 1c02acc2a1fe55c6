//! What a claim hands over, so that nothing stays locked by nobody when the caller has gone away.

/// Something claimed for a caller. Where nobody takes it out, it is given back.
pub(crate) struct Parcel<T> {
    contents: Option<T>,
    give_back: Option<Box<dyn FnOnce(T) + Send>>,
}

impl<T> Parcel<T> {
    pub(crate) fn new(contents: T, give_back: impl FnOnce(T) + Send + 'static) -> Self {
        Self { contents: Some(contents), give_back: Some(Box::new(give_back)) }
    }

    /// The caller has it now.
    pub(crate) fn open(mut self) -> Option<T> {
        self.give_back = None;
        self.contents.take()
    }
}

impl<T> Drop for Parcel<T> {
    fn drop(&mut self) {
        if let (Some(contents), Some(give_back)) = (self.contents.take(), self.give_back.take()) {
            give_back(contents);
        }
    }
}
