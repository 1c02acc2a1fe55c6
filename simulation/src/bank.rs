//! The bank workload. An account is an orchestration that takes transfers from its queue and continues as new. It pays
//! another account with an activity that puts a message into the other queue. The sum of all balances never changes.

use std::collections::BTreeSet;
use std::time::Duration;

use duroxide::{ActivityContext, OrchestrationContext};
use serde::{Deserialize, Serialize};

use crate::rng::SeededRng;
use crate::script::QUEUE;

/// The name of the account orchestration.
pub const ACCOUNT: &str = "Account";
/// The name of the paying activity.
pub const PAY: &str = "Pay";
/// The number of messages that an execution takes before it continues as new.
const MESSAGES_PER_EXECUTION: usize = 6;

/// The first balance of an account. No set of transfers exceeds it.
pub const OPENING_BALANCE: i64 = 1_000;

/// The accounts of a bank and their transfers.
#[derive(Clone, Debug)]
pub struct BankWorkload {
    /// The beginning of the names of its accounts. No two banks share it.
    pub prefix: String,
    /// The number of accounts.
    pub accounts: usize,
    /// The transfers. The number of a transfer is its index here.
    pub transfers: Vec<Transfer>,
}

/// One transfer.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// The account that pays.
    pub from: usize,
    /// The account that is paid.
    pub to: usize,
    /// The amount.
    pub amount: i64,
}

impl BankWorkload {
    /// Draws transfers between this number of accounts.
    pub fn draw(rng: &mut SeededRng, accounts: usize, transfers: usize) -> Self {
        let account = |rng: &mut SeededRng| usize::try_from(rng.among(0..=accounts as u64 - 1)).unwrap_or(0);
        let transfers = (0..transfers).map(|_| {
            let from = account(rng);
            let to = (from + 1 + account(rng) % (accounts - 1).max(1)) % accounts;
            Transfer { from, to, amount: i64::try_from(rng.among(1..=9)).unwrap_or(1) }
        });
        Self { prefix: String::new(), accounts, transfers: transfers.collect() }
    }

    /// The instance of an account.
    pub fn instance(&self, account: usize) -> String {
        format!("{}account {account}", self.prefix)
    }

    /// The message that closes an account: the numbers of transfers that it sends and receives.
    pub fn closing(&self, account: usize) -> AccountMessage {
        let count = |chosen: &dyn Fn(&Transfer) -> bool| self.transfers.iter().filter(|t| chosen(t)).count();
        AccountMessage::Close { sent: count(&|t| t.from == account), received: count(&|t| t.to == account) }
    }

    /// The last balance of an account.
    pub fn balance(&self, account: usize) -> i64 {
        self.transfers.iter().fold(OPENING_BALANCE, |balance, transfer| {
            let paid = if transfer.from == account { transfer.amount } else { 0 };
            let got = if transfer.to == account { transfer.amount } else { 0 };
            balance - paid + got
        })
    }
}

/// A message in the queue of an account. No two have the same nonce.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AccountDelivery {
    /// A number that is unique to the call that enqueued it.
    pub nonce: u64,
    /// The content.
    pub message: AccountMessage,
}

/// The content of a message to an account.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum AccountMessage {
    /// Pays another account.
    Transfer {
        /// The transfer's number.
        number: usize,
        /// The instance to pay to.
        to: String,
        /// The amount.
        amount: i64,
    },
    /// Another account has paid.
    Credit {
        /// The transfer's number.
        number: usize,
        /// The amount.
        amount: i64,
    },
    /// Ends the account after these numbers of transfers.
    Close {
        /// Transfers that it sends.
        sent: usize,
        /// Transfers that it receives.
        received: usize,
    },
}

/// The state of an account.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct AccountState {
    balance: i64,
    sent: BTreeSet<usize>,
    received: BTreeSet<usize>,
    nonces: BTreeSet<u64>,
    close: Option<(usize, usize)>,
}

impl AccountState {
    /// The state of a new account, as the input of the orchestration.
    pub fn opening() -> String {
        let state = Self { balance: OPENING_BALANCE, ..Self::default() };
        serde_json::to_string(&state).expect("the state is plain data")
    }

    fn is_closed(&self) -> bool {
        self.close.is_some_and(|(sent, received)| self.sent.len() == sent && self.received.len() == received)
    }
}

/// The account orchestration. Its output is its balance.
pub async fn account(context: OrchestrationContext, input: String) -> Result<String, String> {
    let mut state: AccountState = serde_json::from_str(&input).map_err(|error| error.to_string())?;
    for _ in 0..MESSAGES_PER_EXECUTION {
        if state.is_closed() {
            return Ok(state.balance.to_string());
        }
        let delivery = context.dequeue_event(QUEUE).await;
        let delivery: AccountDelivery = serde_json::from_str(&delivery).map_err(|error| error.to_string())?;
        if !state.nonces.insert(delivery.nonce) {
            return Err(format!("message {delivery:?} arrived twice"));
        }
        match delivery.message {
            AccountMessage::Transfer { number, to, amount } => {
                if state.sent.insert(number) {
                    state.balance -= amount;
                    pay_until_ok(&context, &to, number, amount).await;
                }
            }
            // The paying activity may run twice.
            AccountMessage::Credit { number, amount } => {
                if state.received.insert(number) {
                    state.balance += amount;
                }
            }
            AccountMessage::Close { sent, received } => state.close = Some((sent, received)),
        }
    }
    if state.is_closed() {
        return Ok(state.balance.to_string());
    }
    let state = serde_json::to_string(&state).map_err(|error| error.to_string())?;
    context.continue_as_new(state).await
}

/// Pays, and repeats that until the activity succeeds.
async fn pay_until_ok(context: &OrchestrationContext, to: &str, number: usize, amount: i64) {
    let input = serde_json::json!({ "to": to, "number": number, "amount": amount }).to_string();
    while context.schedule_activity(PAY, input.as_str()).await.is_err() {
        context.schedule_timer(Duration::from_millis(500)).await;
    }
}

/// The paying activity. It puts the amount into the queue of the other account.
pub async fn pay(context: ActivityContext, input: String) -> Result<String, String> {
    let input: serde_json::Value = serde_json::from_str(&input).map_err(|error| error.to_string())?;
    let to = input["to"].as_str().unwrap_or_default();
    let message = AccountMessage::Credit {
        number: usize::try_from(input["number"].as_u64().unwrap_or(0)).unwrap_or(0),
        amount: input["amount"].as_i64().unwrap_or(0),
    };
    let delivery = AccountDelivery { nonce: fastrand::u64(..1 << 50), message };
    let delivery = serde_json::to_string(&delivery).map_err(|error| error.to_string())?;
    context.get_client().enqueue_event(to, QUEUE, delivery).await.map_err(|error| error.to_string())?;
    Ok(String::new())
}
