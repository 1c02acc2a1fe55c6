//! Physical partitions: asked one at a time, so that a look costs the same however many there are.
//!
//! Only whole ones are asked. The gateway answers 400 to a window inside a physical partition, so that ranges come from
//! [`Store::physical_partitions`] and nowhere else. One that is split meanwhile is answered by all that it has become. One
//! that is merged with its neighbour is such a window from then on. The service answers 400 to that, and the SDK keeps its
//! list: so after a 400 the list is fetched anew, and a range that is not in it any more is reported as
//! [`StoreError::PartitionsChanged`].

use super::{
    error::{describe, StoreError},
    Deadline, Pages, QueryTimeout, Statement, Store, MIN_PAUSE,
};
use azure_data_cosmos::{feed::FeedRange, options::ReadFeedRangesOptions, FeedScope};
use serde::de::DeserializeOwned;

impl Store {
    /// The container's physical partitions, by their hashes.
    ///
    /// The SDK has the list since the container was opened and gets another when an answer shows that it is out of date, so
    /// that this takes no request as a rule.
    pub(crate) async fn physical_partitions(&self, deadline: Deadline) -> Result<Vec<FeedRange>, StoreError> {
        self.list_partitions(ReadFeedRangesOptions::default(), deadline).await
    }

    /// The same, from the service and not from what the SDK remembers.
    pub(super) async fn refresh_partitions(&self, deadline: Deadline) -> Result<Vec<FeedRange>, StoreError> {
        self.list_partitions(ReadFeedRangesOptions::default().with_force_refresh(true), deadline).await
    }

    async fn list_partitions(
        &self,
        options: ReadFeedRangesOptions,
        deadline: Deadline,
    ) -> Result<Vec<FeedRange>, StoreError> {
        let mut pause = MIN_PAUSE;
        loop {
            let asked = self.inner.container.read_feed_ranges(Some(options.clone()));
            let detail = match tokio::time::timeout_at(deadline.instant(), asked).await {
                Ok(Ok(mut ranges)) => {
                    ranges.sort_by(|a, b| a.min_inclusive().cmp(b.min_inclusive()));
                    return Ok(ranges);
                }
                // Whatever the SDK met on the way, it only says that there is no list.
                Ok(Err(error)) => describe(&error),
                Err(_) => "the deadline passed while the request was on its way".to_owned(),
            };
            self.pause(&mut pause, None, deadline).await;
            if deadline.passed() {
                return Err(StoreError::Unavailable { detail: format!("list of physical partitions: {detail}") });
            }
        }
    }

    /// Asks the physical partitions that `range` covers, page by page.
    pub(crate) fn range_pages<T: DeserializeOwned + Send + 'static>(
        &self,
        range: &FeedRange,
        statement: Statement,
        patience: impl Into<QueryTimeout>,
    ) -> Result<Pages<T>, StoreError> {
        let pages = self.pages_across(FeedScope::range(range.clone()), statement, patience.into())?;
        Ok(pages.of_range(range))
    }
}
