//! Queries, page by page.
//!
//! A page that fails is asked for again and the ones before it are not: a long history is read under throttling as long as
//! each of its pages gets through. The position after the last page that came is the SDK's continuation; with it a query
//! goes on in a new iterator, since one that has failed gives nothing more.

use super::{
    error::StoreError, regions::Origin, rows::Rows, Call, CallOutcome, Deadline, OperationKind, Response, Statement,
    Store, MIN_PAUSE,
};
use crate::model::Partition;
use azure_data_cosmos::{
    feed::{ContinuationToken, FeedRange, QueryPageIterator},
    options::{ExcludedRegions, FeedOptions, MaxItemCountHint, QueryOptions},
    CosmosError, FeedScope, Query,
};
use futures::StreamExt;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use std::{marker::PhantomData, time::Duration};
use tokio::time::Instant;
use tracing::Instrument;

/// How long a query of several pages may take.
#[derive(Clone, Copy, Debug)]
pub(crate) enum QueryTimeout {
    /// All its pages together.
    Until(Deadline),
    /// Each page: what makes progress may go on.
    PerPage(Duration),
}

impl From<Deadline> for QueryTimeout {
    fn from(deadline: Deadline) -> Self {
        Self::Until(deadline)
    }
}

impl QueryTimeout {
    /// By when the next page must have come.
    fn deadline(self) -> Deadline {
        match self {
            Self::Until(deadline) => deadline,
            Self::PerPage(time) => Deadline::after(time),
        }
    }
}

impl Store {
    /// Asks one logical partition; returns everything that matches. A document that can't be read is an error, which names it:
    /// decisions about an instance need all of its documents.
    pub(crate) async fn query_partition<T: DeserializeOwned + Send + 'static>(
        &self,
        partition: &Partition,
        statement: Statement,
        patience: impl Into<QueryTimeout>,
    ) -> Result<Vec<T>, StoreError> {
        self.partition_pages(partition, statement, patience)?.collect().await?.complete()
    }

    /// Asks one logical partition page by page, for what may be too much to hold.
    pub(crate) fn partition_pages<T: DeserializeOwned + Send + 'static>(
        &self,
        partition: &Partition,
        statement: Statement,
        patience: impl Into<QueryTimeout>,
    ) -> Result<Pages<T>, StoreError> {
        let patience = patience.into();
        let call = self.call(OperationKind::PartitionQuery, partition, statement.name(), patience.deadline());
        self.pages(call, statement, FeedScope::partition(partition), patience)
    }

    /// Asks the whole container; returns everything that matches, so the statement bounds it. The caller says what becomes of
    /// rows that can't be read: they must not fail what is asked about other instances.
    pub(crate) async fn query_container<T: DeserializeOwned + Send + 'static>(
        &self,
        statement: Statement,
        patience: impl Into<QueryTimeout>,
    ) -> Result<Rows<T>, StoreError> {
        self.container_pages(statement, patience)?.collect().await
    }

    /// Asks the whole container page by page, for what may be too much to hold or may stop early. Nothing is sent before
    /// the first page is asked for.
    pub(crate) fn container_pages<T: DeserializeOwned + Send + 'static>(
        &self,
        statement: Statement,
        patience: impl Into<QueryTimeout>,
    ) -> Result<Pages<T>, StoreError> {
        self.pages_across(FeedScope::full_container(), statement, patience.into())
    }

    pub(super) fn pages_across<T: DeserializeOwned + Send + 'static>(
        &self,
        scope: FeedScope,
        statement: Statement,
        patience: QueryTimeout,
    ) -> Result<Pages<T>, StoreError> {
        // `TOP` never reaches the partitions: without a page size each returns as much as it likes.
        debug_assert!(statement.page_size().is_some(), "{} has no page size", statement.name());
        let anywhere = Partition::system("any");
        let call = self.call(OperationKind::ContainerQuery, &anywhere, statement.name(), patience.deadline());
        self.pages(call, statement, scope, patience)
    }

    fn pages<T: DeserializeOwned + Send + 'static>(
        &self,
        call: Call,
        statement: Statement,
        scope: FeedScope,
        patience: QueryTimeout,
    ) -> Result<Pages<T>, StoreError> {
        let call = match statement.request_options() {
            request_options if request_options.is_authoritative() => call.with_options(request_options),
            request_options => call.with_options(request_options).leaving_session(),
        };
        let page_size = statement.page_size().map_or(MaxItemCountHint::ServerDecides, MaxItemCountHint::Limit);
        let query = statement.into_query()?;
        let (store, position) = (self.clone(), Position::Start);
        let (range, open, relisted, row) = (None, None, false, PhantomData);
        Ok(Pages { store, call, patience, query, scope, range, page_size, open, position, relisted, row })
    }
}

/// The pages of one query, in order.
pub(crate) struct Pages<T> {
    store: Store,
    call: Call,
    patience: QueryTimeout,
    query: Query,
    scope: FeedScope,
    /// The physical partitions that it asks, where it asks some of them only.
    range: Option<FeedRange>,
    page_size: MaxItemCountHint,
    /// The list of physical partitions was fetched anew after a page was refused.
    relisted: bool,
    /// The SDK's iterator, until a page of it fails. The SDK reads a page as a whole, so it gets a type that can't fail: each
    /// row is read by itself afterwards.
    open: Option<QueryPageIterator<Box<RawValue>>>,
    position: Position,
    row: PhantomData<fn() -> T>,
}

/// Where the pages that came so far end.
enum Position {
    Start,
    After(ContinuationToken),
    /// The SDK could not say.
    Unknown,
    End,
}

impl<T: DeserializeOwned + Send + 'static> Pages<T> {
    pub(super) fn of_range(mut self, range: &FeedRange) -> Self {
        self.range = Some(range.clone());
        self
    }

    /// The next page, which may be empty; none after the last.
    pub(crate) async fn next(&mut self) -> Result<Option<Rows<T>>, StoreError> {
        let span = self.call.span.clone();
        let page = self.next_page().instrument(span).await?;
        Ok(page.map(|rows| self.store.read_rows(&self.call, rows)))
    }

    /// So many rows or more, where the service's pages are smaller, too; and whether there may be still more.
    pub(crate) async fn at_least(&mut self, rows: usize) -> Result<(Rows<T>, bool), StoreError> {
        let mut found = Rows::default();
        while found.len() < rows {
            // After the last page this takes no request.
            let Some(page) = self.next().await? else { return Ok((found, false)) };
            found.extend(page);
        }
        Ok((found, true))
    }

    /// All rows that are left.
    pub(crate) async fn collect(mut self) -> Result<Rows<T>, StoreError> {
        let mut rows = Rows::default();
        while let Some(page) = self.next().await? {
            rows.extend(page);
        }
        Ok(rows)
    }

    async fn next_page(&mut self) -> Result<Option<Vec<Box<RawValue>>>, StoreError> {
        self.call.deadline = self.patience.deadline();
        let mut pause = MIN_PAUSE;
        while !matches!(self.position, Position::End) {
            if self.call.request_options.is_authoritative() && !self.store.inner.regions.is_write_region_known() {
                Box::pin(self.store.find_write_region(self.call.deadline)).await?;
            }
            if matches!((&self.open, &self.position), (None, Position::Unknown)) {
                return Err(self.call.give_up("a page failed, and the SDK can't go on from the one before"));
            }
            self.call.begun = Instant::now();
            let outcome = tokio::time::timeout_at(self.call.deadline.instant(), self.ask()).await;
            if !matches!(outcome, Ok(Ok(_))) {
                self.open = None;
            }
            let store = self.store.clone();
            let judged = store.judge(&mut self.call, outcome, &mut pause).await;
            let answer = match judged {
                Err(StoreError::Rejected { .. }) if !self.relisted => {
                    Box::pin(self.relist()).await?;
                    continue;
                }
                answer => answer.map_err(|error| self.in_midst(error))?,
            };
            match answer {
                Some(CallOutcome::Response(page)) => match page.origin {
                    Origin::Write => return Ok(page.items),
                    Origin::Other => {}
                    Origin::Excluded => Box::pin(self.meet_excluded(&mut pause)).await?,
                },
                Some(CallOutcome::SessionRefused) => {
                    self.call.leaves_session = false;
                    self.call.request_options = self.call.request_options.authoritative();
                }
                Some(CallOutcome::Refused(refusal)) => {
                    let detail = format!("the query {} was answered {refusal:?}", self.call.document);
                    return Err(StoreError::Malformed { detail });
                }
                None => {}
            }
        }
        Ok(None)
    }

    /// Asks for the page at the present position, once.
    async fn ask(&mut self) -> Result<Page, CosmosError> {
        let pages = match &mut self.open {
            Some(pages) => pages,
            None => {
                let options = self.options();
                let container = &self.store.inner.container;
                let items = container.query_items(self.query.clone(), self.scope.clone(), Some(options)).await?;
                self.open.insert(items.into_pages())
            }
        };
        let Some(page) = pages.next().await.transpose()? else {
            self.position = Position::End;
            return Ok(Page { items: None, requests: 0, charge: 0.0, origin: Origin::Write });
        };
        let charge = page.headers().request_charge().map_or(0.0, |c| c.value());
        let diagnostics = page.diagnostics();
        let requests = diagnostics.request_count();
        let origin = match self.call.request_options.is_authoritative() {
            true => self.store.inner.regions.origin(&diagnostics),
            false => Origin::Write,
        };
        if origin == Origin::Write {
            self.position = pages.to_continuation_token().map_or(Position::Unknown, Position::After);
        } else {
            // The page does not count: it is asked for again, from the same position.
            self.open = None;
        }
        Ok(Page { items: Some(page.into_items()), requests, charge, origin })
    }

    /// A region has answered that was excluded: the write region may be another one by now.
    async fn meet_excluded(&mut self, pause: &mut Duration) -> Result<(), StoreError> {
        self.store.find_write_region(self.call.deadline).await?;
        self.store.pause(pause, None, self.call.deadline).await;
        if self.call.deadline.passed() {
            return Err(self.call.give_up("the write region did not answer, another region did"));
        }
        Ok(())
    }

    fn options(&self) -> QueryOptions {
        let feed =
            FeedOptions::default().with_max_item_count(self.page_size).with_max_fan_out(self.store.inner.max_fan_out);
        let mut operation = self.call.options();
        if self.call.request_options.is_authoritative() {
            let excluded = self.store.inner.regions.excluded().into_iter();
            operation.excluded_regions = Some(excluded.fold(ExcludedRegions::new(), ExcludedRegions::with_region));
        }
        let options = QueryOptions::default().with_operation_options(operation).with_feed_options(feed);
        match &self.position {
            Position::After(token) => options.with_continuation_token(token.clone()),
            _ => options,
        }
    }

    /// A physical partition that was merged with another answers 400, and the SDK keeps the list that names it. So the list
    /// is fetched anew before a 400 is taken for a wrong query.
    async fn relist(&mut self) -> Result<(), StoreError> {
        self.relisted = true;
        let partitions = self.store.refresh_partitions(self.call.deadline).await?;
        match &self.range {
            Some(range) if !partitions.contains(range) => {
                let detail = format!("the query {} asked partitions that were merged or split", self.call.document);
                Err(StoreError::PartitionsChanged { detail })
            }
            _ => Ok(()),
        }
    }

    /// A query whose first page was taken is not wrong in itself: what is refused later is its continuation, as when
    /// partitions have merged meanwhile. Asked again from the start it activities.
    fn in_midst(&self, error: StoreError) -> StoreError {
        match (&self.position, error) {
            (Position::After(_), StoreError::Rejected { detail, .. }) => self.call.give_up(&detail),
            (_, error) => error,
        }
    }
}

/// One page, or the end.
struct Page {
    items: Option<Vec<Box<RawValue>>>,
    requests: usize,
    charge: f64,
    origin: Origin,
}

impl Response for Page {
    fn requests(&self) -> usize {
        self.requests
    }

    fn charge(&self) -> f64 {
        self.charge
    }
}
