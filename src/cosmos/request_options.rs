//! How a request is made, beside what it asks for: which writes it must see, and how much it matters.

use azure_data_cosmos::options::{
    OperationOptionsBuilder, PriorityLevel, ReadConsistencyStrategy, ThroughputControlOptionsBuilder,
};

tokio::task_local! {
    /// Set where everything that a task does can wait.
    static BACKGROUND: ();
}

/// Does something whose every request lets others go first, where throughput is short.
pub(crate) async fn in_background<F: std::future::Future>(what: F) -> F::Output {
    BACKGROUND.scope((), what).await
}

/// How a request is made.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestOptions {
    consistency: ReadConsistencyStrategy,
    priority: Option<PriorityLevel>,
    authoritative: bool,
}

impl Default for RequestOptions {
    /// Whatever the account's default is: below Session the SDK would send no session token, and a process would not see
    /// what it has written itself. Writes don't look at it.
    fn default() -> Self {
        Self { consistency: ReadConsistencyStrategy::Session, priority: None, authoritative: false }
    }
}

impl RequestOptions {
    /// One replica's word, whenever the service finds time for it.
    pub(super) fn read_eventual() -> Self {
        Self { consistency: ReadConsistencyStrategy::Eventual, ..Self::default() }.in_background()
    }

    /// Everything that was committed in the region that answers.
    pub(super) fn latest_committed(self) -> Self {
        Self { consistency: ReadConsistencyStrategy::LatestCommitted, ..self }
    }

    /// Everything that was committed, as the write region knows it.
    pub(super) fn authoritative(self) -> Self {
        Self { authoritative: true, ..self.latest_committed() }
    }

    pub(super) fn is_authoritative(self) -> bool {
        self.authoritative
    }

    /// Where throughput is short, others go first, if the account has priority-based execution; otherwise it says nothing.
    pub(super) fn in_background(self) -> Self {
        Self { priority: Some(PriorityLevel::Low), ..self }
    }

    pub(super) fn apply(self, options: OperationOptionsBuilder) -> OperationOptionsBuilder {
        let options = options.with_read_consistency_strategy(self.consistency);
        let of_all = BACKGROUND.try_with(|()| PriorityLevel::Low).ok();
        match self.priority.or(of_all) {
            Some(priority) => {
                let control = ThroughputControlOptionsBuilder::new().with_priority_level(priority).build();
                options.with_throughput_control(control)
            }
            None => options,
        }
    }
}
