//! A whole soak.

use std::io::IsTerminal as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use duroxide::Client;
use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};
use serde_json::Value;
use tokio::task::JoinSet;

use crate::audit::{self, Inventory};
use crate::dice::Dice;
use crate::errand::Errands;
use crate::ledger::{Broken, Ledger};
use crate::soak::crew::Place;
use crate::soak::faults;
use crate::soak::site::Site;
use crate::soak::stage::{Phase, Stage};
use crate::soak::tally::Figures;
use crate::soak::tidy::Tidy;
use crate::soak::traffic::{Register, Traffic};
use crate::story::Story;

/// How long errands may take once nothing bad happens any more.
const PATIENCE: Duration = Duration::from_secs(300);
/// How long it may take after that until nothing is left under way.
const SETTLING: Duration = Duration::from_secs(120);
/// How often a log is told how it stands.
const LOG_EVERY: Duration = Duration::from_secs(30);

/// What a soak is to be like.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// How long things go wrong.
    pub time: Duration,
    /// Worker processes.
    pub workers: usize,
    /// Errands under way at once, at most.
    pub under_way: usize,
    /// What errands and blows are drawn from.
    pub seed: u64,
}

/// What became of it.
#[derive(Debug)]
pub struct Outcome {
    /// What does not hold.
    pub broken: Vec<Broken>,
    /// What was counted.
    pub figures: Figures,
    /// How long it took in all.
    pub took: Duration,
    /// Requests on the wire.
    pub requests: u64,
    /// What happened last.
    pub story: Arc<Story>,
    /// What is stored in the end.
    pub documents: Vec<Value>,
}

/// Runs a soak.
pub async fn run(plan: Plan) -> Result<Outcome> {
    let begun = Instant::now();
    let soak = Soak::open(plan).await?;
    let progress = tokio::spawn(show(soak.stage.clone(), plan.time));
    let played = soak.play().await;
    progress.abort();
    let outcome = Outcome {
        broken: soak.stage.broken(),
        figures: soak.stage.tally.read(),
        took: begun.elapsed(),
        requests: soak.site.requests(),
        story: soak.stage.story.clone(),
        documents: soak.site.documents(),
    };
    if let Ok(site) = Arc::try_unwrap(soak.site) {
        site.close().await;
    }
    played.map(|()| outcome)
}

struct Soak {
    plan: Plan,
    stage: Arc<Stage>,
    site: Arc<Site>,
    register: Arc<Register>,
}

impl Soak {
    async fn open(plan: Plan) -> Result<Self> {
        let stage = Arc::new(Stage::default());
        let site = Arc::new(Site::open(&stage.story).await?);
        Ok(Self { plan, stage, site, register: Arc::default() })
    }

    async fn play(&self) -> Result<()> {
        let mut dice = Dice::new(self.plan.seed);
        // The container is there before anything goes wrong.
        let provider = self.site.provider("client").await?;
        let tidying = self.site.provider("tidy").await?;
        let crew = self.crew(&mut dice);
        let mut sky = JoinSet::new();
        sky.spawn(faults::blow(self.stage.clone(), self.site.clone(), self.plan.workers, dice.fork()));
        sky.spawn(faults::split(self.stage.clone(), self.site.clone(), dice.fork()));
        let traffic = tokio::spawn(self.traffic(Client::new(provider.clone()), dice.fork()).flow());
        let tidy = tokio::spawn(self.tidy(Client::new(tidying.clone())).keep_at_it());
        tokio::select! {
            () = tokio::time::sleep(self.plan.time) => {}
            interrupted = tokio::signal::ctrl_c() => interrupted?,
            () = self.stage.failed() => {}
        }
        self.stage.enter(Phase::Calm);
        while let Some(ended) = sky.join_next().await {
            ended??;
        }
        self.end_errands(traffic).await?;
        tidy.await?;
        self.settle().await;
        self.stage.enter(Phase::Over);
        crew.join_all().await;
        for provider in [provider, tidying] {
            provider.shutdown().await;
        }
        self.audit().await
    }

    fn crew(&self, dice: &mut Dice) -> JoinSet<()> {
        let mut crew = JoinSet::new();
        for number in 0..self.plan.workers {
            let (stage, endpoint) = (self.stage.clone(), self.site.endpoint());
            crew.spawn(Place { stage, endpoint, number, dice: dice.fork() }.keep());
        }
        crew
    }

    fn traffic(&self, client: Client, dice: Dice) -> Traffic {
        let (story, ledger) = (self.stage.story.clone(), Arc::new(Ledger::default()));
        let runner = Errands { client: Arc::new(client), story, ledger };
        let (stage, register) = (self.stage.clone(), self.register.clone());
        Traffic { stage, runner, register, under_way: self.plan.under_way, dice }
    }

    fn tidy(&self, client: Client) -> Tidy {
        Tidy { stage: self.stage.clone(), site: self.site.clone(), client, register: self.register.clone() }
    }

    async fn end_errands(&self, mut traffic: tokio::task::JoinHandle<()>) -> Result<()> {
        // Who has failed already shows what is there, and soon.
        let patience = if self.stage.broken().is_empty() { PATIENCE } else { PATIENCE / 5 };
        if let Ok(ended) = tokio::time::timeout(patience, &mut traffic).await {
            return Ok(ended?);
        }
        traffic.abort();
        for instance in self.register.under_way() {
            let detail = format!("its client still waits, {patience:?} after nothing bad happens any more");
            self.stage.report(Broken { invariant: "every orchestration ends", instance, detail });
        }
        Ok(())
    }

    /// Waits until nothing is under way any more; the audit says what is.
    async fn settle(&self) {
        let patience = Instant::now() + SETTLING;
        while Instant::now() < patience && !Inventory::of(self.site.documents()).passing().is_empty() {
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
    }

    async fn audit(&self) -> Result<()> {
        let inventory = Inventory::of(self.site.documents());
        let fates = self.register.fates();
        let provider = self.site.provider("auditor").await?;
        let client = Client::new(provider.clone());
        let mut broken = inventory.passing();
        broken.extend(inventory.faults(&fates, true));
        broken.extend(audit::endings(&client, &fates).await);
        broken.extend(audit::counters(&provider, &inventory).await);
        provider.shutdown().await;
        broken.into_iter().for_each(|broken| self.stage.report(broken));
        let left = inventory.metrics().total_instances;
        self.stage.tally.count(|figures| figures.orchestrations += left);
        Ok(())
    }
}

/// Shows how it stands: in a line that changes, or where nobody looks at one, in a line now and then.
async fn show(stage: Arc<Stage>, time: Duration) {
    let begun = Instant::now();
    if !std::io::stderr().is_terminal() {
        loop {
            tokio::time::sleep(LOG_EVERY).await;
            eprintln!("{:>5.1} min: {}", begun.elapsed().as_secs_f64() / 60.0, stage.tally.read().line());
        }
    }
    let bar = ProgressBar::new(time.as_secs()).with_finish(ProgressFinish::AndClear);
    let style = ProgressStyle::with_template("{spinner} {bar:20} {elapsed_precise} {wide_msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    loop {
        let rest = if stage.is_rough() { "" } else { "waiting for the rest: " };
        bar.set_position(begun.elapsed().min(time).as_secs());
        bar.set_message(format!("{rest}{}", stage.tally.read().line()));
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}
