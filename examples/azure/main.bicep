// duroxide workers on Azure Cosmos DB, without any key. The template creates:
// - an account that accepts Entra ID only, with its database and container
// - an identity that may read and write documents
// - the worker as a Container App that runs with this identity
//
//   az group create --name <group> --location westeurope
//   az deployment group create --resource-group <group> --template-file main.bicep \
//     --parameters accountName=<account> image=<registry>/<worker>:<tag>
//
// Without `image` the template creates everything except the worker. A test compares this file with the code.
// docs/deployment.md describes the whole deployment.

@description('Name of the Cosmos DB account: unique in the world, lower-case letters, digits and hyphens.')
@minLength(3)
@maxLength(44)
param accountName string

@description('Region of the account, its only write region, and of the workers.')
param location string = resourceGroup().location

@description('Name of the database.')
param databaseName string = 'duroxide'

@description('Name of the container.')
param containerName string = 'duroxide'

@description('Upper limit of autoscale in RU/s; the container idles at a tenth. 0 makes the account serverless.')
param maxThroughput int = 1000

@description('Image of the worker. Empty: no worker.')
param image string = ''

@description('Login server of an Azure container registry that the identity may pull from. Empty: a public image.')
param registryServer string = ''

@description('Number of workers.')
@minValue(1)
param replicas int = 2

@description('Your object id, to use the account from your machine: az ad signed-in-user show --query id -o tsv')
param developerPrincipalId string = ''

// Cosmos DB Built-in Data Contributor reads and writes documents. It cannot create databases or containers.
var dataContributor = '00000000-0000-0000-0000-000000000002'
var serverless = maxThroughput == 0

resource account 'Microsoft.DocumentDB/databaseAccounts@2024-08-15' = {
  name: accountName
  location: location
  kind: 'GlobalDocumentDB'
  properties: {
    databaseAccountOfferType: 'Standard'
    // Only Entra ID signs in: the account's keys stop working.
    disableLocalAuth: true
    minimalTlsVersion: 'Tls12'
    consistencyPolicy: {
      defaultConsistencyLevel: 'Session'
    }
    // With several write regions, Cosmos DB merges conflicting writes later, and ETags protect nothing.
    enableMultipleWriteLocations: false
    locations: [
      {
        locationName: location
        failoverPriority: 0
      }
    ]
    backupPolicy: {
      type: 'Continuous'
      continuousModeProperties: {
        tier: 'Continuous7Days'
      }
    }
    capabilities: serverless ? [{ name: 'EnableServerless' }] : []
  }
}

resource database 'Microsoft.DocumentDB/databaseAccounts/sqlDatabases@2024-08-15' = {
  parent: account
  name: databaseName
  properties: {
    resource: {
      id: databaseName
    }
  }
}

resource container 'Microsoft.DocumentDB/databaseAccounts/sqlDatabases/containers@2024-08-15' = {
  parent: database
  name: containerName
  properties: {
    resource: {
      id: containerName
      partitionKey: {
        kind: 'Hash'
        paths: ['/instanceId']
        version: 2
      }
      // Time to live is on, without a default. Documents that expire carry their own time.
      defaultTtl: -1
      indexingPolicy: loadJsonContent('indexing-policy.json')
    }
    options: serverless ? {} : { autoscaleSettings: { maxThroughput: maxThroughput } }
  }
}

resource identity 'Microsoft.ManagedIdentity/userAssignedIdentities@2023-01-31' = {
  name: '${accountName}-worker'
  location: location
}

resource workerRole 'Microsoft.DocumentDB/databaseAccounts/sqlRoleAssignments@2024-08-15' = {
  parent: account
  name: guid(account.id, identity.id, dataContributor)
  properties: {
    principalId: identity.properties.principalId
    roleDefinitionId: '${account.id}/sqlRoleDefinitions/${dataContributor}'
    scope: account.id
  }
}

resource developerRole 'Microsoft.DocumentDB/databaseAccounts/sqlRoleAssignments@2024-08-15' = if (!empty(developerPrincipalId)) {
  parent: account
  name: guid(account.id, developerPrincipalId, dataContributor)
  properties: {
    principalId: developerPrincipalId
    roleDefinitionId: '${account.id}/sqlRoleDefinitions/${dataContributor}'
    scope: account.id
  }
}

resource logs 'Microsoft.OperationalInsights/workspaces@2023-09-01' = if (!empty(image)) {
  name: '${accountName}-logs'
  location: location
  properties: {
    sku: {
      name: 'PerGB2018'
    }
    retentionInDays: 30
  }
}

resource environment 'Microsoft.App/managedEnvironments@2024-03-01' = if (!empty(image)) {
  name: '${accountName}-environment'
  location: location
  properties: {
    appLogsConfiguration: {
      destination: 'log-analytics'
      logAnalyticsConfiguration: {
        customerId: logs!.properties.customerId
        sharedKey: logs!.listKeys().primarySharedKey
      }
    }
  }
}

resource worker 'Microsoft.App/containerApps@2024-03-01' = if (!empty(image)) {
  name: '${accountName}-worker'
  location: location
  identity: {
    type: 'UserAssigned'
    userAssignedIdentities: {
      '${identity.id}': {}
    }
  }
  properties: {
    environmentId: environment.id
    configuration: {
      activeRevisionsMode: 'Single'
      registries: empty(registryServer) ? [] : [{ server: registryServer, identity: identity.id }]
    }
    template: {
      // Longer than WORKER_GRACE_SECONDS, so that the worker can finish its work after SIGTERM.
      terminationGracePeriodSeconds: 40
      containers: [
        {
          name: 'worker'
          image: image
          resources: {
            cpu: json('0.5')
            memory: '1Gi'
          }
          env: [
            { name: 'COSMOS_ENDPOINT', value: account.properties.documentEndpoint }
            { name: 'COSMOS_CREDENTIAL', value: 'managed_identity' }
            { name: 'AZURE_CLIENT_ID', value: identity.properties.clientId }
            { name: 'COSMOS_DATABASE', value: databaseName }
            { name: 'COSMOS_CONTAINER', value: containerName }
            { name: 'COSMOS_REGION', value: location }
            { name: 'COSMOS_CREATE_IF_MISSING', value: 'false' }
            { name: 'WORKER_GRACE_SECONDS', value: '20' }
            { name: 'WORKER_METRICS_PORT', value: '9090' }
            { name: 'WORKER_LOG_FORMAT', value: 'json' }
          ]
          probes: [
            {
              type: 'Liveness'
              tcpSocket: {
                port: 9090
              }
              initialDelaySeconds: 10
            }
          ]
        }
      ]
      scale: {
        minReplicas: replicas
        maxReplicas: replicas
      }
    }
  }
  dependsOn: [
    container
    workerRole
  ]
}

@description('Value for COSMOS_ENDPOINT.')
output endpoint string = account.properties.documentEndpoint

@description('Value for AZURE_CLIENT_ID of a process that runs with this identity.')
output identityClientId string = identity.properties.clientId
